"""Stores of the bytes.  One file per kind of store; `rendezvous.stores.open.open_store` chooses by URL."""
