"""From checkpoint to artifact: the passes, the IR they hand on, and the pipeline that runs them."""
