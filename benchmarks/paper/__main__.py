from benchmarks.paper.command import main

if __name__ == "__main__":
    main()
