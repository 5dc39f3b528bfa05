"""Tests of agreement through a bucket: stores, records, means, and the simulator's schedules."""
