"""How replicas agree: slots, wishes, offers, the rules that close a step, the chain of commits."""
