"""calc: arithmetic in text, with exact fractions."""
