"""One run's slots: their observed state, the next actions, and the results of these actions."""
