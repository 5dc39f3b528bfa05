"""`diloco watch --web`: a run's page, served on this machine."""
