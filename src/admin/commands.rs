//! What a person asks of a running service (a signal or a POST to the admin port), and the answer to it.

use tokio::sync::{mpsc, oneshot};

/// Orders that wait at once; more are refused with a sentence rather than queued.
const WAITING: usize = 8;

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Read the configuration file again, at once.
    Reload,
    /// Write a checkpoint at the next step border.
    Checkpoint,
    /// Hand out no more jobs; what is under way is finished.
    Pause,
    /// Go on after a pause.
    Resume,
}

/// An order on its way; whoever takes it owes the answer: a sentence, of what was done or of why not.
#[derive(Debug)]
pub struct Given {
    pub order: Order,
    pub answer: oneshot::Sender<Result<String, String>>,
}

/// Where orders are given.
#[derive(Clone, Debug)]
pub struct Orders(mpsc::Sender<Given>);

/// A way for orders, and its other end.
pub fn channel() -> (Orders, mpsc::Receiver<Given>) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Orders(sender), receiver)
}

impl Orders {
    /// Gives an order and waits for its answer.
    pub async fn give(&self, order: Order) -> Result<String, String> {
        let (answer, answered) = oneshot::channel();
        self.0.try_send(Given { order, answer }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => "too many orders wait already; ask again in a second".to_owned(),
            mpsc::error::TrySendError::Closed(_) => "the run is ending".to_owned(),
        })?;
        answered.await.unwrap_or_else(|_| Err("the run ended before the order was carried out".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_order_is_answered_refused_when_too_many_wait_and_when_nobody_listens() {
        let (orders, mut taken) = channel();
        let asked = tokio::spawn({
            let orders = orders.clone();
            async move { orders.give(Order::Pause).await }
        });
        let given = taken.recv().await.unwrap();
        assert_eq!(given.order, Order::Pause);
        given.answer.send(Ok("paused".into())).unwrap();
        assert_eq!(asked.await.unwrap(), Ok("paused".into()));

        let waiting: Vec<_> = (0..WAITING)
            .map(|_| {
                let orders = orders.clone();
                tokio::spawn(async move { orders.give(Order::Reload).await })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(orders.give(Order::Reload).await.unwrap_err().contains("too many"));
        drop(taken);
        for order in waiting {
            assert!(order.await.unwrap().unwrap_err().contains("before the order"));
        }
        assert!(orders.give(Order::Reload).await.unwrap_err().contains("ending"));
    }
}
