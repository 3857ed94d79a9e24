"""The torch side of Headway: loads a model and runs the steps that the scheduler plans."""
