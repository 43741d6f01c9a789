"""From a launch to PTX, through Triton's compiler and its disk cache."""
