"""Where the bytes lie.  One file per kind of store; `rendezvous.store.open_store` chooses by URL."""
