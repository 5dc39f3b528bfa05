"""Reading a run: from its bucket alone, without torch, and never a write.

scope.py    which records a view needs          ahead.py    many GETs at the same time
extent.py   how far each series of records goes  cache.py    what is write-once, kept on this machine
"""
