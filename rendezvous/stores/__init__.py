"""The stores, with one module per kind of store.  `rendezvous.stores.open.open_store` chooses by URL."""
