//! Commands to a running service: channel from the admin port to the configuration controller.

use tokio::sync::{mpsc, oneshot};

/// Limit of queued commands; further ones are refused.
const QUEUE: usize = 8;

/// Command to a running service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read the configuration file again.
    Reload,
    /// Write a checkpoint at the next step boundary.
    Checkpoint,
    /// Send no more jobs to the targets; jobs in progress are finished.
    Pause,
    /// Continue after a pause.
    Resume,
}

/// Queued command. Its receiver must send a reply: a sentence with the result or the reason of the refusal.
#[derive(Debug)]
pub struct Request {
    pub command: Command,
    pub reply: oneshot::Sender<Result<String, String>>,
}

/// Sending side of the command channel.
#[derive(Clone, Debug)]
pub struct Commands(mpsc::Sender<Request>);

/// Creates the command channel.
pub fn channel() -> (Commands, mpsc::Receiver<Request>) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (Commands(sender), receiver)
}

impl Commands {
    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// A sentence: the reason of the refusal, a full queue, or a run that ends.
    pub async fn send(&self, command: Command) -> Result<String, String> {
        let (reply, replied) = oneshot::channel();
        self.0.try_send(Request { command, reply }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => "too many queued commands; try again in 1 s".to_owned(),
            mpsc::error::TrySendError::Closed(_) => "the run is ending".to_owned(),
        })?;
        replied.await.unwrap_or_else(|_| Err("the run ended before the command was executed".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn commands_are_executed_or_refused() {
        let (commands, mut requests) = channel();
        let sent = tokio::spawn({
            let commands = commands.clone();
            async move { commands.send(Command::Pause).await }
        });
        let request = requests.recv().await.unwrap();
        assert_eq!(request.command, Command::Pause);
        request.reply.send(Ok("paused".into())).unwrap();
        assert_eq!(sent.await.unwrap(), Ok("paused".into()));

        let waiting: Vec<_> = (0..QUEUE)
            .map(|_| {
                let commands = commands.clone();
                tokio::spawn(async move { commands.send(Command::Reload).await })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(commands.send(Command::Reload).await.unwrap_err().contains("too many"));
        drop(requests);
        for command in waiting {
            assert!(command.await.unwrap().unwrap_err().contains("before the command"));
        }
        assert!(commands.send(Command::Reload).await.unwrap_err().contains("ending"));
    }
}
