"""ledger: accounts that move money between each other, in cents."""
