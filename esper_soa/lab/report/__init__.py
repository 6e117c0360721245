"""One HTML file that shows runs or a sweep; made from run folders alone, needs no torch."""
