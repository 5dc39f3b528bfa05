"""Agreement among replicas: slots, wishes, offers, the rules that close a step, the chain of commits."""
