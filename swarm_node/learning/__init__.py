"""What a policy learns from groups: the pool, advantages, the F-TIS loss, the trainer, and DistillSparse."""
