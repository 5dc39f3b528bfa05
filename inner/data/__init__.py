"""Rows: read from files or the Hub, checked, dealt out to replicas in an order that a seed decides."""
