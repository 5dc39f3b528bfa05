"""One replica's side of a run, live: offer, agree, average, snapshot, leave."""
