"""The process of one replica.   replica.py: join, train, end.   evaluation.py: held-out prompts."""

from diloco.replica.replica import main as main  # launchers start `diloco.replica:main`
