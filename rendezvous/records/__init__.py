"""What lies in the bucket, as bytes: records, digests, bodies of vectors; read with suspicion."""
