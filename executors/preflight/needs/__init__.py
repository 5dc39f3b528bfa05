"""What replicas need where they run: packages, engines, boxes."""
