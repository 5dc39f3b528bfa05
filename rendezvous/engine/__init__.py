"""One replica's part in a run: offer, agree, average, snapshot, leave."""
