"""One HTML file that shows what a run, several runs or a sweep did; made from run folders alone,
needs no torch.
"""
