"""Training drafters: target features, training-time test, losses, the step and the loop around it."""
