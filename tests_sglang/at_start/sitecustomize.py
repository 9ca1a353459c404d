"""On the path of tools that run SGLang on a CPU, and of the processes they start: stubs first."""

import cpu_stubs

cpu_stubs.install()
