"""What a step costs in seconds: roofline formulas, or a fit to measured times."""
