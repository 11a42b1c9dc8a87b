"""What ranks that hold the same keep equal: gradients of whole parameters, tied copies, running statistics."""
