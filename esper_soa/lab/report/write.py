"""The command line of reports: `esper-report RUN... [-o report.html] [--figures FOLDER]`, also
`python -m esper_soa.lab.report.write`.

Exit status: 0 done, 1 a file that could not be written, 2 a mistake that we found.
"""

import argparse
from pathlib import Path

from esper_soa.config.paths import user_path
from esper_soa.lab.report.bundle import bundle
from esper_soa.lab.report.figures import write_figures
from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import check
from esper_soa.system.files import write_text
from esper_soa.training.files.run_folder import RunFolder

HELP = """\
  RUN...           run folders, or folders that hold some, as a sweep does; a run that was killed
                   or still goes on is shown as far as it is
  -o report.html   the file to write; by default report.html in the folder if there
                   is one RUN, else here
  --figures FOLDER
                   write every figure into FOLDER, as SVG, PDF and PNG, and no page

  esper-report runs/cifar_3seed/2026-01-31_12-00-00
  esper-report runs/cifar_3seed/sweep_2026-01-31_12-00-00 -o sweep.html
"""


def main(arguments: list[str] | None = None) -> None:
    usage = "esper-report RUN... [-o report.html] [--figures FOLDER]"
    words = parser(usage, "Write one HTML file that shows what runs did.", HELP)
    words.add_argument("runs", metavar="RUN", nargs="+", help=argparse.SUPPRESS)
    words.add_argument("-o", dest="out", default="", help=argparse.SUPPRESS)
    words.add_argument("--figures", default="", help=argparse.SUPPRESS)
    options = words.parse_args(arguments)
    with ending_with_status():
        if options.figures:
            drawn = user_path("--figures", options.figures)
            allowed = drawn.is_dir() or not drawn.exists()
            check(allowed, "--figures", drawn, allowed="a folder, or a new one")
            print(*write_figures(find_runs(options.runs), drawn), sep="\n")
            return
        folder = Path() if len(options.runs) > 1 else user_path("RUN", options.runs[0])
        path = user_path("-o", options.out) if options.out else RunFolder(folder).report
        check(not path.exists() or path.is_file(), "-o", path, allowed="a file, which is replaced")
        place = path.resolve() if options.out else folder.resolve() / path.name
        write_text(place, page_of(find_runs(options.runs), bundle()))
        print(path)


if __name__ == "__main__":
    main()
