"""Before anything is launched: the place, its price, and every mistake that is visible on this machine."""
