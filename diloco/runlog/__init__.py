"""Read a run from its bucket, without torch and without writes.

scope.py    the records that a view needs       ahead.py    many GETs at the same time
extent.py   the length of a series of records   cache.py    write-once records, kept on this machine
"""
