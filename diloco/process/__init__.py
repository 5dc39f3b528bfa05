"""The needs of any process of a run: a session with its beats, a journal, marks, exit codes, room on disk."""
