"""The tables of [inner], each setting declared once, with its bounds.  No torch here."""
