"""The gradient of weights from rows and gradients in 8 bits."""
