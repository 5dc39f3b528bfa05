"""The outer loop: θ as one flat vector, what it moved by, the outer step; managers/ put it under torchft."""
