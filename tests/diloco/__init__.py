"""Tests of the outer loop, a run's records and readers, and whole fleets on this machine."""
