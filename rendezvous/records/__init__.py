"""The bytes of the bucket's objects: records, digests and bodies of vectors.  Every read is checked."""
