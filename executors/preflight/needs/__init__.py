"""Check packages, engines, boxes and devices that replicas need where they run."""
