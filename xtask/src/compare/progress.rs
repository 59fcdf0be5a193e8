use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Shows progress on the error output: a bar on a terminal, lines elsewhere.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    num_commands: usize,
    num_begun: usize,
}

impl Progress {
    pub(super) fn new(num_commands: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let template = "{wide_bar} {pos}/{len}  time left {eta}\n{msg}";
            let style = ProgressStyle::with_template(template).expect("the template is well formed");
            ProgressBar::new(num_commands as u64).with_style(style)
        });
        Progress { bar, num_commands, num_begun: 0 }
    }

    pub(super) fn begin(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.num_begun as u64);
                bar.set_message(text.to_owned());
            }
            None => eprintln!("{}/{}  {text}", self.num_begun + 1, self.num_commands),
        }
        self.num_begun += 1;
    }

    /// Prints a line that the bar does not overwrite.
    pub(super) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
