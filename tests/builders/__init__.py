"""What tests share: worlds, runs, files, processes; users/ has modules as users write them."""
