"""Tests of the house: rooms, rules, English, pages, examples, studies, the wheel."""
