"""Tasks with answers that can be checked, the reasoner that comes with the package, and the demo. Not for the Hub."""
