"""A bucket in the cloud, through obstore: its address, credentials, clients, requests, and the words for refusals."""

from importlib.util import find_spec

if find_spec("obstore") is None:
    raise ImportError("s3://, gs://, az:// and hf:// need obstore: pip install 'serverless-diloco[serverless]'")
