"""Agreement among replicas: slots, the desired state, offers, the rules that close a step, the chain of commits."""
