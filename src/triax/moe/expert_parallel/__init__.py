"""Expert parallelism: tokens go to the devices that hold their experts, and come back summed."""
