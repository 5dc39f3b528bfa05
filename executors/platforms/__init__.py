"""Where replicas run: one protocol (base), and a module or folder for each platform."""
