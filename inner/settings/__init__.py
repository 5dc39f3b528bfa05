"""The tables of [inner]. Each declares its settings once, with bounds.  No torch here."""
