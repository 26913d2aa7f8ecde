"""What a model is fed: batches, their split into fitted and held-out images, augmentation."""
