"""The command esper-export: `python -m esper_soa.export RUN format=onnx`."""

from esper_soa.training.start.export import main

if __name__ == "__main__":
    main()
