"""`diloco watch --web`: the same as a page, served on this machine."""
