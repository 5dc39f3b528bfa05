"""Before a launch: the places, their price, and every mistake that is visible on this machine."""
