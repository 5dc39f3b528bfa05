"""What any process of a run needs: a session with its beats, a journal, marks, exit codes, room on disk."""
