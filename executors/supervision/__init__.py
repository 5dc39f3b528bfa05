"""One run, wherever its replicas are: who is missing, what may still be spent, who supervises."""
