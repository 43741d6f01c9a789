"""`make sanitize`: NVIDIA's compute-sanitizer over the kernels of the MoE ops."""
