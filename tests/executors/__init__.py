"""Tests of the command line, the supervisor and every platform, against servers on this machine."""
